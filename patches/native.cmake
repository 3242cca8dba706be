# Compiles the sources in native/ into llama.cpp's targets: those of a folder into the target of upstream's folder of
# the same name, as upstream's files there are compiled. For sources that have the patches (apply.cmake).

if(NOT CMAKE_CURRENT_SOURCE_DIR STREQUAL CMAKE_SOURCE_DIR)
    return() # a project inside
endif()

get_filename_component(LLAMA_NATIVE_DIR ${CMAKE_CURRENT_LIST_DIR}/../native ABSOLUTE)
set(LLAMA_HOOKED_DIR ${CMAKE_SOURCE_DIR})
if(EXISTS ${CMAKE_SOURCE_DIR}/vendor/llama.cpp/src/CMakeLists.txt)
    set(LLAMA_HOOKED_DIR ${CMAKE_SOURCE_DIR}/vendor/llama.cpp)
endif()

function(llama_native_sources)
    set(cuda ${LLAMA_HOOKED_DIR}/ggml/src/ggml-cuda)
    file(GLOB kernels CONFIGURE_DEPENDS ${LLAMA_NATIVE_DIR}/ggml/src/ggml-cuda/*.cu)
    foreach(target ggml-cuda ggml-hip ggml-musa)
        if(NOT TARGET ${target} OR NOT kernels)
            continue()
        endif()
        target_sources(${target} PRIVATE ${kernels})
        target_include_directories(${target} PRIVATE
            ${LLAMA_NATIVE_DIR}/ggml/src ${LLAMA_NATIVE_DIR}/ggml/src/ggml-cuda ${cuda})
        # HIP and MUSA set the language and the flags of each file
        foreach(property LANGUAGE COMPILE_FLAGS)
            get_source_file_property(value ${cuda}/ggml-cuda.cu TARGET_DIRECTORY ${target} ${property})
            if(value)
                set_source_files_properties(${kernels} TARGET_DIRECTORY ${target} PROPERTIES ${property} "${value}")
            endif()
        endforeach()
    endforeach()

    # wgmma is an instruction of sm_90a alone. A build for Hopper has these sources for sm_90a beside sm_90; the driver
    # takes the former, and a kernel that isn't there isn't used.
    if(TARGET ggml-cuda)
        get_target_property(archs ggml-cuda CUDA_ARCHITECTURES)
        get_directory_property(version DIRECTORY ${cuda} DEFINITION CMAKE_CUDA_COMPILER_VERSION)
        if("${archs}" MATCHES "(^|;)90(-real|-virtual)?(;|$)" AND version VERSION_GREATER_EQUAL 12)
            set_source_files_properties(${LLAMA_NATIVE_DIR}/ggml/src/ggml-cuda/mmf-wgmma.cu TARGET_DIRECTORY ggml-cuda
                PROPERTIES COMPILE_OPTIONS "-gencode=arch=compute_90a,code=sm_90a")
        endif()
    endif()

    # the CPU's targets link it, and so find what ggml-cpu's files include, too
    if(TARGET ggml-base)
        target_include_directories(ggml-base PUBLIC $<BUILD_INTERFACE:${LLAMA_NATIVE_DIR}/ggml/src>)
    endif()

    # each by itself, outside of libllama's unity build
    file(GLOB sources CONFIGURE_DEPENDS ${LLAMA_NATIVE_DIR}/src/*.cpp)
    if(sources)
        target_sources(llama PRIVATE ${sources})
        set_source_files_properties(${sources} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
    target_include_directories(llama PUBLIC $<BUILD_INTERFACE:${LLAMA_NATIVE_DIR}/src>)

    if(TARGET test-backend-ops)
        target_include_directories(test-backend-ops PRIVATE ${LLAMA_NATIVE_DIR}/tests)
        if(NOT WIN32 OR NOT BUILD_SHARED_LIBS) # the test calls what a DLL does not export
            llama_build_and_test(${LLAMA_NATIVE_DIR}/tests/test-kv-mask.cpp)
            target_include_directories(test-kv-mask PRIVATE ${LLAMA_HOOKED_DIR}/src)
            llama_build_and_test(${LLAMA_NATIVE_DIR}/tests/test-row-sampler.cpp)
        endif()
    endif()
endfunction()

cmake_language(DEFER CALL llama_native_sources) # at the end, when the targets are known
